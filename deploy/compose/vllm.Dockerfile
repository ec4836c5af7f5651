# vLLM's own image with the plug-in that exports its scheduler's state.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${VLLM_IMAGE}
COPY deploy/vllm_plugin /tmp/block/deploy/vllm_plugin
COPY services/engine_state /tmp/block/services/engine_state
RUN pip install --no-deps /tmp/block/deploy/vllm_plugin && rm -r /tmp/block
