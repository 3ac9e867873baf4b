"""The suites. A test is a claim; see CONTRIBUTING.md."""
