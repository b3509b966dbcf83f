"""Jobs to run and to copy. Each file has a `Config` and `build(config) -> Job`, as your own has."""
