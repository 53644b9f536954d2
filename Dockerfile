# The page in a container, and a Docker Space (docs/usage.md):
#   docker build -t bass . && docker run -p 7860:7860 -v bass-cache:/cache bass
# On a GPU: docker run --gpus all ... (the NVIDIA Container Toolkit, and driver 580 or newer for torch from PyPI).
# torch from PyPI brings gigabytes of CUDA: for a CPU give --build-arg PIP_EXTRA_INDEX_URL=, torch's index of CPU builds.
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton

# On a GPU Triton builds its launcher in C when a kernel is first launched.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# As a Space does: user 1000, who owns the cache and nothing else.
RUN useradd --uid 1000 --create-home bass && mkdir /cache && chown bass /cache
WORKDIR /app
ARG PIP_EXTRA_INDEX_URL=
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .

USER 1000
# Fetches the model, converts it and compiles the kernels, so that a start takes seconds. A CPU of another kind
# compiles its own at its first start.
RUN python -m bass_core generate "Hello" --max-new-tokens 4
VOLUME /cache

# As the container's first process, Python ignores SIGTERM: docker stop would wait, and then kill it.
STOPSIGNAL SIGINT
EXPOSE 7860
HEALTHCHECK --interval=60s --timeout=10s --start-period=300s CMD ["python", "-c", "import http.client as c; a = c.HTTPConnection('127.0.0.1', 7860, timeout=9); a.request('GET', '/theme.css'); assert a.getresponse().status == 200"]
CMD ["python", "app.py", "--host", "0.0.0.0", "--port", "7860"]
