"""The files of a run: its directory, its snapshots and its ledger."""
