"""The pure core: from rows' headers and texts to the layout of a pack.

Job: decide what each pack of a logical stream holds and where each of its tokens, labels and pixels goes.
Nothing here reads files, opens sockets, decodes pixels or knows torch: rows and image sizes are handed in by
`bagelplane.sources`, pixels are filled in later by `bagelplane.stream`. All state is in objects that one
thread owns; nothing is global, so two streams in one process cannot disturb each other.
"""
