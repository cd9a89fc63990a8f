"""Pure builders: one module per child kind, from the resolved plan to the object that we want. No clients, no clock.

The pod templates depend on the plan alone. Nothing of the operator itself (version, image, flags) may enter them, or an
upgrade of the operator would restart every pod of every pipeline at once (T10); a golden file in the tests guards this.
"""
