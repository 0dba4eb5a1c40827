"""Where rows physically are: arenas on the device, the pool on the host, and streams that copy between them.

May import `plugins` and the layout and transfer protocols of `kv`; it knows pages and rows, no sessions.
"""
