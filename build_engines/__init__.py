"""Turn a published checkpoint into what the server loads, and train the tiny model the tests speak with.

Runs offline, before serving. Nothing here is imported by the serving path.
"""
