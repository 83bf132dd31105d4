"""The claims of arXiv 2604.15356 (sequential compression, probabilistic language tries) and of its predecessor 2604.06228.

Named here in the order of the ledger: each statement as printed, then what does hold.
"""

from proofs_checks.sequential import entropy, injectivity, ratio, trie

total_entropy = entropy.total_entropy
per_step_entropy = entropy.per_step_entropy
per_step_corrected = entropy.per_step_corrected
per_step_decoded = entropy.per_step_decoded
per_step_injective = entropy.per_step_injective
injectivity_on_real_models = injectivity.on_real_models
injectivity_up_to_embeddings = injectivity.up_to_embeddings
ratio_914000 = ratio.ratio_914000
ratio_corrected = ratio.ratio_corrected
metric = trie.metric
similarity_ultrametric = trie.similarity_ultrametric
tree_distance = trie.tree_distance
retrieval = trie.retrieval
swap_time = trie.swap_time
swap_time_corrected = trie.swap_time_corrected
