"""The write-ahead log as bytes: pages, records, block references, full-page images."""
