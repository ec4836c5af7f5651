# vLLM's own image, and the plug-in that shows its scheduler's state.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${VLLM_IMAGE}
COPY deploy/vllm_plugin /tmp/vllm_plugin
RUN pip install --no-deps /tmp/vllm_plugin && rm -r /tmp/vllm_plugin
