//! The log's way to the disk. A transaction is written into the log by whoever commits it, and the next one may begin at
//! once; one thread brings the log to disk for all who wait, as many commits at a time as there are by then.
//!
//! The log is kept from its beginning up to the first gap, so what was committed on top of a commit can be on disk only
//! together with it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::{io, thread};

use tokio::sync::watch;

pub struct Log {
    /// How many commits there have been that somebody wants on disk.
    committed: AtomicU64,
    on_disk: watch::Receiver<u64>,
    added: mpsc::Sender<u64>,
}

impl Log {
    /// Starts the thread, which ends with the log.
    pub fn start(mut bring_to_disk: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (added, to_bring) = mpsc::channel();
        let (told, on_disk) = watch::channel(0);
        let work = move || {
            while let Some(number) = newest(&to_bring) {
                bring_to_disk();
                told.send_replace(number);
            }
        };
        thread::Builder::new().name("stockade-disk".to_owned()).spawn(work)?;
        Ok(Self { committed: AtomicU64::new(0), on_disk, added })
    }

    /// Has a commit brought to disk that was just made; returns its number. To be called before the next can begin.
    pub fn add(&self) -> u64 {
        let number = self.committed.fetch_add(1, Ordering::Release) + 1;
        // A thread that is gone is noticed by whoever waits.
        let _ = self.added.send(number);
        number
    }

    pub fn newest(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    pub async fn until_on_disk(&self, number: u64) -> sqlx::Result<()> {
        let mut on_disk = self.on_disk.clone();
        on_disk.wait_for(|reached| *reached >= number).await.map(drop).map_err(|_| sqlx::Error::WorkerCrashed)
    }
}

/// The newest commit that was added, once there is one.
fn newest(added: &Receiver<u64>) -> Option<u64> {
    let first = added.recv().ok()?;
    Some(added.try_iter().last().unwrap_or(first))
}

/// What brings SQLite's log for that file to disk. Should the disk fail, the process ends: what was written may be lost
/// though it looks kept, and only recovery from disk can tell.
pub fn of(database: &Path) -> impl FnMut() + Send + use<> {
    let mut path = database.as_os_str().to_owned();
    path.push("-wal");
    let path = PathBuf::from(path);
    let mut file = None;
    move || {
        if let Err(error) = bring_to_disk(&path, &mut file) {
            crate::db::abort_for_the_disk(&error);
        }
    }
}

fn bring_to_disk(path: &Path, file: &mut Option<File>) -> io::Result<()> {
    let known = match file.take() {
        // SQLite removes the log when its last connection closes, and begins another.
        Some(file) if file.metadata()?.nlink() > 0 => file,
        _ => File::open(path)?,
    };
    file.insert(known).sync_data()
}
