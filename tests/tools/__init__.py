"""Programs that tests run and pip does not bring: a Go module each, and programs.py, which finds or builds them."""
