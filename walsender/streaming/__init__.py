"""The process that decodes for one stream."""
