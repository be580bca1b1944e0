"""From records to transactions: heap changes, commits, the order of transactions."""
