//! Opening a database: Postgres as a pool, SQLite as one writer and a pool of readers under a lock file.
//!
//! A database that could lose what was answered is refused with a sentence that says what to change: a SQLite library
//! with the WAL-reset bug, a Postgres that does not wait for its disk, a file that another process serves.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};

use super::Engine;
use super::lanes::Lanes;
use super::migrate::Schema;
use super::sqlite::{Opening, Readers, Writer};

/// The first SQLite whose WAL cannot be corrupted by two connections resetting it at once.
const SQLITE_VERSION_MIN: (u32, u32, u32) = (3, 51, 3);
/// For how long a connection to Postgres counts as alive without being asked.
const POSTGRES_TRUSTED_FOR: Duration = Duration::from_millis(500);
/// How long to wait for a Postgres that did not answer to say why.
const SAY_WHY_WITHIN: Duration = Duration::from_secs(2);

/// How to open a database; every limit has its setting in `config.rs`.
#[derive(Clone)]
pub struct Options {
    /// `sqlite:path` or `postgres://…`
    pub url: String,
    pub connections_max: u32,
    pub acquire_timeout: Duration,
    pub busy_timeout: Duration,
    /// Stop growing at this many pages (SQLite), as a disk that is full would; 0 is no limit.
    pub pages_max: u32,
    /// The tables of the host, migrated after the kernel's.
    pub schemas: &'static [Schema],
}

impl Options {
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connections_max: 20,
            acquire_timeout: Duration::from_secs(5),
            busy_timeout: Duration::from_secs(5),
            pages_max: 0,
            schemas: &[],
        }
    }
}

/// Opens it for a server, which may write.
pub(super) async fn to_serve(options: &Options) -> anyhow::Result<Engine> {
    Ok(match sqlite_path(&options.url)? {
        Some(path) => open_sqlite(options, &path).await?,
        None => open_postgres(options).await?,
    })
}

/// Opens it to look at, beside the server that owns it.
pub(super) async fn to_look(options: &Options) -> anyhow::Result<Engine> {
    Ok(match sqlite_path(&options.url)? {
        Some(path) => {
            Engine::Sqlite { writer: None, readers: sqlite_readers(options, &path).await?, lock: Mutex::default() }
        }
        None => open_postgres(options).await?,
    })
}

/// The path of a `sqlite:` URL, or `None` for Postgres.
fn sqlite_path(url: &str) -> anyhow::Result<Option<PathBuf>> {
    if let Some(rest) = url.strip_prefix("sqlite:") {
        let path = rest.strip_prefix("//").unwrap_or(rest);
        if path.is_empty() || path.starts_with(":memory:") || path.contains('?') {
            bail!("`{url}` is not a database file; give a path, as in sqlite:stockade.db");
        }
        return Ok(Some(PathBuf::from(path)));
    }
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return Ok(None);
    }
    bail!("the database URL must start with sqlite: or postgres://")
}

async fn open_postgres(options: &Options) -> anyhow::Result<Engine> {
    let connect = PgConnectOptions::from_str(&options.url)
        .context("the Postgres URL cannot be read")?
        .application_name("stockade")
        .disable_statement_logging()
        // A statement that hangs must not hold locks forever; ours take milliseconds, so compiling them never pays.
        .options([("statement_timeout", "30s"), ("idle_in_transaction_session_timeout", "60s"), ("jit", "off")])
        // Less than a statement may take, to tell a locked row from a slow statement.
        .options([("lock_timeout", "20s")])
        // Whoever waited for a lock must see what was committed meanwhile, whatever the database does by default.
        .options([("default_transaction_isolation", "read committed")]);
    let lanes = Lanes::out_of(options.connections_max);
    let pool = PgPoolOptions::new()
        .max_connections(options.connections_max - lanes.count())
        .acquire_timeout(options.acquire_timeout)
        .test_before_acquire(false)
        // One that was just in use is there; one that rested may have lost its server meanwhile.
        .before_acquire(|connection, rested| {
            Box::pin(async move {
                if rested.idle_for > POSTGRES_TRUSTED_FOR {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .connect_with(connect.clone())
        .await;
    let pool = match pool {
        // It kept trying, and does not say what was in the way.
        Err(timed_out @ sqlx::Error::PoolTimedOut) => {
            match tokio::time::timeout(SAY_WHY_WITHIN, connect.connect()).await {
                Ok(Err(why)) => Err(anyhow!(timed_out).context(in_words(&why))),
                Ok(Ok(_)) | Err(_) => Err(anyhow!(timed_out)),
            }
        }
        Err(error @ sqlx::Error::Database(_)) => Err(anyhow!(in_words(&error))),
        tried => tried.map_err(anyhow::Error::new),
    };
    let (host, port) = (connect.get_host(), connect.get_port());
    let pool = pool.with_context(|| format!("cannot connect to Postgres at {host}:{port}"))?;
    for setting in ["synchronous_commit", "fsync"] {
        let value: String = sqlx::query_scalar("SELECT current_setting($1)").bind(setting).fetch_one(&pool).await?;
        if value == "off" {
            bail!("Postgres has {setting} = off: orders that were answered could be lost; turn it on");
        }
    }
    Ok(Engine::Postgres { pool, lanes })
}

/// What was in the way, without what sqlx says around it.
fn in_words(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(error) => error.message().to_owned(),
        sqlx::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

async fn open_sqlite(options: &Options, path: &Path) -> anyhow::Result<Engine> {
    let path = &without_links(path).with_context(|| format!("cannot open the database file {}", path.display()))?;
    let lock = lock_beside(path)?;
    check_sqlite_version(rusqlite::version())?;
    let writer = Writer::open(opening(options, path), options.acquire_timeout)
        .with_context(|| format!("cannot open the database file {}", path.display()))?;
    Ok(Engine::Sqlite {
        writer: Some(writer),
        readers: sqlite_readers(options, path).await?,
        lock: Mutex::new(Some(lock)),
    })
}

async fn sqlite_readers(options: &Options, path: &Path) -> anyhow::Result<Readers> {
    Readers::open(opening(options, path), options.acquire_timeout)
        .await
        .with_context(|| format!("cannot open the database file {} for reading", path.display()))
}

fn opening(options: &Options, path: &Path) -> Opening {
    Opening { path: path.to_owned(), pages_max: options.pages_max, busy_timeout: options.busy_timeout }
}

/// Where the file really is, or will be: two names of one file have one lock.
fn without_links(path: &Path) -> std::io::Result<PathBuf> {
    match (path.canonicalize(), path.parent(), path.file_name()) {
        (Err(error), Some(folder), Some(name)) if error.kind() == std::io::ErrorKind::NotFound => {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            match path.read_link() {
                Ok(target) => without_links(&folder.join(target)),
                Err(_) => Ok(folder.canonicalize()?.join(name)),
            }
        }
        (found, ..) => found,
    }
}

/// The lock file beside a database that this process serves.
pub(super) struct ServerLock(File);

impl Drop for ServerLock {
    /// Closing the file would not do: a child process that is just being started has a copy of it until it executes.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// Keeps a second server off the file: two writers would each believe in their own wake-ups and leases.
fn lock_beside(path: &Path) -> anyhow::Result<ServerLock> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&name)
        .with_context(|| format!("cannot create {}", Path::new(&name).display()))?;
    match file.try_lock() {
        Ok(()) => Ok(ServerLock(file)),
        Err(std::fs::TryLockError::WouldBlock) => bail!(
            "another stockade process serves {}; stop it, or give this one another STOCKADE_DATABASE_URL",
            path.display()
        ),
        Err(std::fs::TryLockError::Error(error)) => Err(error).context("cannot lock the database file"),
    }
}

fn check_sqlite_version(version: &str) -> anyhow::Result<()> {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    if (next(), next(), next()) < SQLITE_VERSION_MIN {
        let (major, minor, patch) = SQLITE_VERSION_MIN;
        bail!("SQLite {version} may corrupt its WAL; build with {major}.{minor}.{patch} or newer");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sqlite_url_names_its_file_with_or_without_slashes() {
        for url in ["sqlite:a/b.db", "sqlite://a/b.db"] {
            assert_eq!(sqlite_path(url).unwrap(), Some(PathBuf::from("a/b.db")));
        }
        assert_eq!(sqlite_path("sqlite:///tmp/b.db").unwrap(), Some(PathBuf::from("/tmp/b.db")));
        assert_eq!(sqlite_path("postgres://localhost/x").unwrap(), None);
        for bad in ["sqlite::memory:", "sqlite:", "mysql://x", "stockade.db"] {
            assert!(sqlite_path(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_file_has_one_lock_by_whatever_name() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.db"), folder.path().join("link.db"));
        std::os::unix::fs::symlink("real.db", &link).unwrap();
        let yet_to_be_made = without_links(&link).unwrap();
        assert_eq!(yet_to_be_made, without_links(&real).unwrap());
        File::create(&real).unwrap();
        let held = lock_beside(&yet_to_be_made).unwrap();
        for name in [&real, &link] {
            assert!(lock_beside(&without_links(name).unwrap()).is_err(), "{name:?}");
        }
        drop(held);
        assert!(lock_beside(&without_links(&link).unwrap()).is_ok());
    }

    #[test]
    fn a_lock_is_released_though_a_child_process_has_a_copy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("test.db");
        let held = lock_beside(&path).unwrap();
        let _copy = held.0.try_clone().unwrap();
        drop(held);
        assert!(lock_beside(&path).is_ok());
    }

    #[test]
    fn an_old_sqlite_library_is_refused() {
        assert!(check_sqlite_version("3.51.2").is_err());
        assert!(check_sqlite_version("3.51.3").is_ok());
        assert!(check_sqlite_version("4.0.0").is_ok());
    }
}
