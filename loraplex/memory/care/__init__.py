"""What keeps the adapters' memory well: checksums and quarantine, compaction, the monitor, prediction."""
