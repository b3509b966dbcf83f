"""Record where the time of a step goes, on every rank."""
