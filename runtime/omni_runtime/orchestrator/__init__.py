"""Requests from admission to their last output. Decisions are pure (`advance`, `pool`, `admission`); `loop` has the
sockets and clocks. Tensors between stages never pass here.
"""
