"""Modules shared by the families.

=================  ================================================================================
options            fields of a configuration as typed options; choices of a run
config_faults      faults that configurations of several families can have
compare_configs    comparison of two configurations: same model or not
deferred_build     references to layer modules that are resolved when a layer builds
published_weights  rules and settings common to several families' published weights
megatron_config    a family's ``TransformerConfig``, derived from the run's
layers             norms, tables, entry to and exit from divided sequences, embedded timesteps
token_shares       a layer's tokens over context-parallel ranks
rotary             rotary positions of a microbatch's tokens
patches            images to tokens and back, fixed positions
attention          attention, MLP and their linears, from Megatron's parts or Transformer Engine's
joint_attention    attention over two streams of tokens
adapters           low-rank adapters beside linear maps, divided over tensor-parallel ranks
mmdit              blocks, embeddings and head of SD3 and Flux
=================  ================================================================================

The first five import neither torch nor Megatron.
"""
