"""Fill a gap: changes that the subscription's slot does not keep are decoded from a WAL archive, and applied."""
