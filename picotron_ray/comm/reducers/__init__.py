"""Ways to sum gradients over replicas, behind one interface (`reducer.Reducer`).

``exact`` and ``point_to_point`` give the sum; ``compressed`` (by ``codecs``) and ``powersgd`` an
approximation, whose error is fed back into the next step (``feedback``). `choose.make_reducer` makes what a
config asks for.
"""
