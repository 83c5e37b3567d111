"""Published weights: one writer, many readers, each version as a small patch.

`patch` codes the bits of a fragment, `manifest` names what a version consists of, `weights` turns a model into words
and back. `publisher` and `subscriber` are the two ends, over any carrier, and `fetching` reads from several at once.
"""
