-- Keys and sessions, each kept as the SHA-256 of what its holder presents.

CREATE TABLE access_keys (
    id            BLOB    NOT NULL PRIMARY KEY,
    name          TEXT    NOT NULL,
    role          TEXT    NOT NULL CHECK (role IN ('viewer', 'client', 'operator', 'admin')),
    -- '*' is every group.
    group_id      TEXT    NOT NULL,
    subsidiary_id TEXT,
    hash          BLOB    NOT NULL UNIQUE,
    created_by    TEXT    NOT NULL,
    created_at    INTEGER NOT NULL,
    expires_at    INTEGER,
    revoked_at    INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE access_sessions (
    hash       BLOB    NOT NULL PRIMARY KEY,
    key_hash   BLOB    NOT NULL,
    group_id   TEXT,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX access_sessions_end ON access_sessions (expires_at);
