"""Which rows went into which pack, and what became of a row.

`replay` plans packs again, from the nearest snapshot or from the start; `explanation` tells of one planned pack all
that there is to say; `search` looks for one row in all packs. They read the data and the snapshots, and write
nothing. Everything runs in the thread of the caller (decoding in threads of the stream).
"""
