"""axolotl's settings that matter and that no field says, and those on which nothing depends.

Source: axolotl 0.19 utils/schemas and integrations (names).
"""

from __future__ import annotations

#: Switches that matter and that no field says -> why.
LEFT = {
    "rl": "batches are of pairs or are generated, and a reference model may run them; simulated as plain training",
    "reward_model": "a head of one score is not simulated; simulated as plain training",
    "process_reward_model": "a head of scores is not simulated; simulated as plain training",
    "relora": "restarts of ReLoRA are not simulated; LoRA is",
    "lisa_n_layers": "blocks that are frozen in turn are not simulated: all weights are trained",
    "unfrozen_parameters": "some of the weights alone are trained there; simulated as training of all",
    "selective_checkpointing": "what it keeps is not simulated: whole blocks are counted as recomputed",
    "layer_offloading": "frozen weights that come from host memory block by block are not simulated",
    "tiled_mlp": "an MLP in slices of the sequence is not simulated",
    "quantize_moe_experts": "experts are counted as the other frozen weights are",
    "qat": "fake quantisation is not simulated", "gptq": "weights quantised so are not simulated",
    "batch_flattening": "a batch without padding is as long as its documents; it is counted as full",
    "gemma4_hybrid_attn_impl": "two kernels of attention are counted as one", "ple_cpu_offload": "is not simulated",
    "flash_attn_fuse_mlp": "fused MLPs have no field", "flash_attn_rms_norm": "fused norms have no field",
    "flash_attn_cross_entropy": "a fused loss has no field: software.fused says it of Composer and Megatron",
    "fp32_norms": "norms are counted in the dtype of the other weights",
    "embeddings_skip_upcast": "embeddings are counted in the dtype of the other weights",
    "model_quantization_config": "weights quantised so are not simulated",
    **dict.fromkeys(("use_scattermoe", "use_sonicmoe", "use_dsv4_kernels", "use_glm_dsa_kernels", "fused_attn_kernel",
                     "large_head_attention", "dsv4_fp4_grouped_mode"), "its kernels have no field"),
    **dict.fromkeys(("use_onebitllms", "nvfp4_merge_aware"), "weights of so few bits are not simulated"),
    "lora_on_cpu": "is not simulated", "use_kernels": "kernels of the hub have no field",
    "experts_implementation": "kernels of experts are those of the stack",
    "deepcompile": "DeepCompile is not simulated", "torch_compile_options": "inductor's options have no field",
    "resize_token_embeddings_to_32x": "the vocabulary is counted as the model has it: --set model.vocab=N",
    "overrides_of_model_config": "the model is counted as its config.json has it: --set model.FIELD=VALUE",
    "model_config": "the model is counted as its config.json has it: --set model.FIELD=VALUE",
    "s2_attention": "attention of shifted groups is not simulated: whole attention is counted",
    "sdpa_varlen": "documents are counted under a mask of sdpa: --set training.attention=flash skips what is between",
    "spectrum_top_fraction": "a part of the weights alone is trained there; simulated as training of all",
    "mora": "MoRA's square matrices are not simulated; LoRA is",
    "dense_mixer": "experts that see every token are not simulated: top_k is",
    "kd_trainer": "a teacher's logits are not simulated", "diffusion": "diffusion's loss is not simulated",
}
#: Names on which neither time nor memory depends, or that others read.
IDLE = (
    "fsdp", "datasets", "test_datasets", "test_value", "base_model_ignore_patterns", "llmcompressor*", "center_*",
    "pretraining_dataset", "shuffle_*", "skip_prepare_dataset", "val_set_size",
    "evals_per_epoch", "saves_per_epoch", "special_tokens*", "tokens*", "added_tokens*", "eot_tokens", "plugins",
    "strict", "base_model_config", "type_of_model", "revision_of_model", "train_on_inputs", "mlflow*", "comet*",
    "use_wandb", "use_mlflow", "use_comet", "use_tensorboard", "use_trackio", "use_swanlab", "swanlab*", "use_otel*",
    "otel*", "gradio*", "loss_watchdog*", "early_stopping*", "lora_alpha", "lora_model_dir", "lora_fan_in_fan_out",
    "loraplus*", "relora_*", "jagged_*", "lisa_*", "peft_*", "peft.*", "merge_*", "cosine_*", "lr_*", "eta_min",
    "dion_*", "qgalore_*", "torchdistx_path", "processor_*", "sample_packing_*", "eval_*", "min_sample_len",
    "excess_length_strategy", "max_prompt_len", "curriculum_sampling", "multipack_real_batches", "use_pose", "pose_*",
    "pretrain_multipack_*", "streaming*", "device", "device_map", "world_size", "ddp", "gc_*", "max_memory",
    "gpu_memory_limit", "default_system_message", "fix_untrained_tokens", "total_*", "is_*_derived_model",
    "generate_*", "generation_*", "num_generation_samples", "profiler_*", "dynamic_checkpoint*", "resources_per_worker",
    "ray_run_name", "use_ray", "trl*", "vllm*", "ebft*", "dpo_*", "kto_*", "orpo_*", "cpo_*", "simpo_*", "rl_beta",
    "do_*", "bench_*", "num_labels", "axolotl_config_path", "heads_k_stride", "experimental_*", "save_*", "bfloat16",
    "float16", "float32", "fp8_config*", "flex_attn_compile_kwargs*", "flash_optimum", "noisy_*", "use_eaft", "eaft_*",
    "xformers_attention", "sdp_attention", "flash_attention", "eager_attention", "flex_attention", "gptq_*",
    "cls_model_config", "tiled_mlp_*", "chunked_cross_entropy_*", "mean_resizing_embeddings",
    "shrink_embeddings", "reinit_weights", "trainer_cls", "hf_use_auth_token", "push_dataset_*", "deprecated*",
    "fsdp_final_state_dict_type", "selective_checkpointing*", "dp_*", "expert_parallel_*", "activation_offloading",
    "llama4_linearized_experts", "freeze_mm_modules", "bnb_config_kwargs*", "qlora_sharded_*", "cloud*", "volumes",
    "optim_args*", "batch_size", "group_by_length", "low_cpu_mem_usage", "unfrozen_*", "project_name", "liger_use_*",
    "image_*", "overrides_of_model_kwargs*", "auto_resume*", "include_tkps", "fsdp_version", "pretraining_sample_*",
    "secrets", "preprocess*", "lora_target_linear", "quantization*", "resume_*", "debug", "local_rank", "uneven_*",
)
