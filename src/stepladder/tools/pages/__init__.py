"""Self-contained HTML pages: plots as figures, and the templates that draw them."""
