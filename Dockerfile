# syntax=docker/dockerfile:1

FROM rust:1.95-slim-bookworm AS build
WORKDIR /build

# The dependencies, over sources that say nothing: this layer is built again only when one of these files changes.
COPY .cargo .cargo
COPY Cargo.toml Cargo.lock ./
COPY crates/kernel/Cargo.toml crates/kernel/
RUN mkdir src crates/kernel/src \
    && echo 'fn main() {}' >src/main.rs \
    && touch src/lib.rs crates/kernel/src/lib.rs \
    && cargo build --release --locked --bin stockade \
    && rm -r src crates/kernel/src

COPY migrations migrations
COPY static static
COPY crates crates
COPY src src
# Cargo compares times, and the copied files may be older than the last build.
RUN touch src/main.rs src/lib.rs crates/kernel/src/lib.rs \
    && cargo build --release --locked --bin stockade \
    && strip target/release/stockade \
    && mkdir /data

# The C library, certificates, and a user who is not root; no shell.
FROM gcr.io/distroless/cc-debian12:nonroot
LABEL org.opencontainers.image.title="Stockade" \
      org.opencontainers.image.description="Orders, stock and notices through messages, every effect exactly once" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY --from=build /build/target/release/stockade /usr/local/bin/stockade
COPY --from=build --chown=65532:65532 /data /data

USER 65532:65532
VOLUME /data
# Others can reach this address, so `serve` wants to be told how it is guarded before it starts.
ENV STOCKADE_LISTEN=0.0.0.0:8080 \
    STOCKADE_DATABASE_URL=sqlite:/data/stockade.db
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["stockade", "healthcheck"]
ENTRYPOINT ["stockade"]
CMD ["serve"]
