"""What families share.

===============  ==================================================================================
options          fields of a configuration as typed options; which of them each run may choose
limits           faults that configurations of several families can have
identity         whether two configurations are the same model
builder          how a chain names its layers' modules before torch is imported
published        rules and settings that families have in common in published weights
megatron_config  a family's ``TransformerConfig``, derived from the run's
layers           norms, tables, the ways into and out of sequence parallelism, embedded timesteps
patches          images to tokens and back, fixed positions
attention        attention, MLP and their linears, of Megatron's parts or Transformer Engine's
joint_attention  attention over two streams of tokens
mmdit            what SD3 and Flux are made of
===============  ==================================================================================

The first five import neither torch nor Megatron.
"""
