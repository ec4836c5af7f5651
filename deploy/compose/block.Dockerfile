# All parts of Block except the vLLM plug-in; the engine model is compiled while the image is built.
FROM python:3.11-slim
COPY pyproject.toml README.md /src/
COPY length_tagger /src/length_tagger
COPY predictor /src/predictor
COPY protos /src/protos
COPY scheduler /src/scheduler
COPY services /src/services
COPY simulator /src/simulator
RUN pip install --no-cache-dir /src && rm -r /src && block warm
ENTRYPOINT ["block"]
