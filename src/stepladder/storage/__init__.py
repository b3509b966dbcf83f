"""What a run keeps on disk: its directory, its snapshots, its ledger."""
