"""Adapters: what an engine expects of its memory layer, on top of this library.

One module an engine. Each imports its engine only when it is called, and nothing else here imports an adapter.
"""
