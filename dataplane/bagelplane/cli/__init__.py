"""The command line: one file a command, found through the table in `app`.

A command reads its arguments, calls the package and shows the result; it holds no logic that another program
could want. Heavy imports stay inside the command's file, which is loaded only when the command runs, so that
`--help` is there at once. Results go to stdout (a table, or JSON with `-o json`), everything else to stderr.
Nothing below may import this package. It runs in the main thread of the process that the user started.
"""
