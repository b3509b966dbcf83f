"""Sources over files of common formats, read where they lie: `stepladder.open_data`."""
