"""Published weights: one writer, many readers, each version as a small patch.

`patch` codes the bits of a fragment, `manifest` names what a version consists of, `weights` turns a model into words
and back.
"""
