"""Looking at a run: logs and progress while it trains."""
