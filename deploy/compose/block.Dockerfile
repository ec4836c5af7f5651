# Everything of ours but the plug-in; kernels are compiled while the image is made.
FROM python:3.11-slim
COPY pyproject.toml README.md /src/
COPY length_tagger /src/length_tagger
COPY predictor /src/predictor
COPY protos /src/protos
COPY scheduler /src/scheduler
COPY services /src/services
RUN pip install --no-cache-dir /src && rm -r /src && block warm
ENTRYPOINT ["block"]
