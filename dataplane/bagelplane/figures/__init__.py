"""What plans and packs look like: numbers of a forecast, its chart, and contact sheets of packs.

- `tally`: counts planned packs; no I/O, nothing but the engine's types.
- `plan_chart`: a forecast as a picture. Needs matplotlib (extra `plot`), which loads when a chart is drawn.
- `contact_sheet`: packs as the model sees them. Needs Pillow alone.

What must not happen here: reading storage, deciding anything about a stream, writing to a terminal. Whoever
calls owns everything; there are no threads.
"""
