-- Keys and sessions, each kept as the SHA-256 of what its holder presents.

CREATE TABLE access_keys (
    id            uuid        NOT NULL PRIMARY KEY,
    name          text        NOT NULL,
    role          text        NOT NULL CHECK (role IN ('viewer', 'client', 'operator', 'admin')),
    -- '*' is every group.
    group_id      text        NOT NULL,
    subsidiary_id text,
    hash          bytea       NOT NULL UNIQUE,
    created_by    text        NOT NULL,
    created_at    timestamptz NOT NULL,
    expires_at    timestamptz,
    revoked_at    timestamptz
);

CREATE TABLE access_sessions (
    hash       bytea       NOT NULL PRIMARY KEY,
    key_hash   bytea       NOT NULL,
    group_id   text,
    expires_at timestamptz NOT NULL
);
CREATE INDEX access_sessions_end ON access_sessions (expires_at);
