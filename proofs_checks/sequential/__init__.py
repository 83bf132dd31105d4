"""The claims of arXiv 2604.15356 (sequential compression, probabilistic language tries) and of its predecessor 2604.06228.

Named here in the order of the ledger: each statement as printed, then what does hold.
"""

from proofs_checks.sequential import (
    entropy,
    gains,
    groups,
    growth,
    injectivity,
    mixture,
    parting,
    ratio,
    recomputing,
    replaying,
    residual,
    sharing,
    sizes,
    stacked,
    surprise,
    trie,
)

total_entropy = entropy.total_entropy
per_step_entropy = entropy.per_step_entropy
per_step_corrected = entropy.per_step_corrected
per_step_decoded = entropy.per_step_decoded
per_step_injective = entropy.per_step_injective
injectivity_on_real_models = injectivity.on_real_models
injectivity_up_to_embeddings = injectivity.up_to_embeddings
perplexity_in_bits = sizes.perplexity_in_bits
cache_of_80_gb = sizes.cache_of_80_gb
cache_in_bytes = sizes.cache_in_bytes
ratio_914000 = ratio.ratio_914000
ratio_corrected = ratio.ratio_corrected
payload_is_surprisal = replaying.payload_is_surprisal
checkpoints = replaying.checkpoints
replay_cost = replaying.replay_cost
recompute_bit_exact = recomputing.bit_exact
recompute_costs = recomputing.costs
improves_with_context = growth.improves
context_plateau = growth.plateau
metric = trie.metric
similarity_ultrametric = trie.similarity_ultrametric
tree_distance = trie.tree_distance
retrieval = trie.retrieval
swap_time = trie.swap_time
swap_time_corrected = trie.swap_time_corrected
prefix_lossless = sharing.prefix_lossless
block_granularity = sharing.block_granularity
tenants_apart = sharing.tenants_apart
layers_additive = sharing.layers_additive
three_layers = stacked.three_layers
storage_corollary = sharing.storage_corollary
storage_of_followers = sharing.storage_of_followers
groups_by_small_similarity = groups.groups_by_small_similarity
groups_by_large_similarity = groups.groups_by_large_similarity
residual_after_divergence = groups.residual_after_divergence
residual_of_aligned_tails = groups.residual_of_aligned_tails
paraphrases = groups.paraphrases
meaning_beyond_the_prefix = groups.meaning
delta_after_divergence = parting.after_divergence
delta_at_divergence = parting.at_divergence
residual_of_a_mixture = mixture.residual_of_a_mixture
residual_entropy = mixture.residual_entropy
residual_rate_distortion = mixture.residual_rate_distortion
speculative_free = residual.speculative_free
speculative_cost = residual.speculative_cost
closed_loop_error = residual.closed_loop_error
known_token = residual.known_token
residual_bounds_on_real_models = surprise.bounds_on_real_models
residual_grows_with_surprisal = surprise.grows_with_surprisal
adaptive_bits = surprise.adaptive
adaptive_bits_corrected = surprise.adaptive_corrected
gains_on_real_models = gains.gains_on_real_models
