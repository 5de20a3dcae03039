"""From a folder or hub id to a model that is checked and ready to run.

loader               the stages of loading, in their order
replica              what draft and verify replicas have in common: loading, memory, description
first_checks         settings that cannot be right, before anything is loaded
model_path           where a model's files are: in a folder, or on the hub
model_config         config.json; refuses what cannot run here. `config_faults` finds impossible values
open_weights         the weights in the files, in parts
stored               weights of quantized checkpoints
move_weights         brings weights to the device; `code_weights` brings them as codes
tokenizer_files      the tokenizer and the chat templates
sampling_defaults    the sampling parameters that a model recommends
fingerprint          tells models apart by samples of their weights; `weights_version` by whole files
check_forward        the self check; `wide_linears` makes it faster
check_determinism    the setting `deterministic`
fp8_kv               the setting `kv_dtype`
attention_shapes     what layers pass to attention
own_attention        modules that compute attention themselves, and `alibi`
layers               models without some of their layers; `layer_agreement` measures how good they are
"""
