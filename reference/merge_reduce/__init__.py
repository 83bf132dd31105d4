"""Merge-reduce (arXiv 2607.01520, section 5): `MergeReduce`, its tree of summaries, its reducers."""

from reference.merge_reduce.codec import MergeReduce
from reference.merge_reduce.law import QueryLaw
from reference.merge_reduce.nodes import REDUCERS, Atoms, reduce_atoms
from reference.merge_reduce.tree import Buckets, prefix_summaries

__all__ = ["REDUCERS", "Atoms", "Buckets", "MergeReduce", "QueryLaw", "prefix_summaries", "reduce_atoms"]
