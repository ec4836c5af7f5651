# vLLM's own image with the plug-in that exports its scheduler's state.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${VLLM_IMAGE}
# the plug-in's build takes the writer of state files from services/engine_state of the same checkout
COPY deploy/vllm_plugin /src/deploy/vllm_plugin
COPY services/engine_state /src/services/engine_state
RUN pip install --no-deps /src/deploy/vllm_plugin && rm -r /src
