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
    /// How many commits have been announced.
    announced: AtomicU64,
    on_disk: watch::Receiver<u64>,
    made: mpsc::Sender<u64>,
}

impl Log {
    /// Starts the thread, which ends with the log.
    pub fn start(mut bring_to_disk: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (made, to_bring) = mpsc::channel();
        let (told, on_disk) = watch::channel(0);
        let work = move || {
            while let Some(number) = newest(&to_bring) {
                bring_to_disk();
                told.send_replace(number);
            }
        };
        thread::Builder::new().name("stockade-disk".to_owned()).spawn(work)?;
        Ok(Self { announced: AtomicU64::new(0), on_disk, made })
    }

    /// Announces a commit that is just being made: from now on readers wait for it, who may see it before we know that
    /// it was made. Whether it was or not, [`Self::bring`] has to follow, before the next one is announced.
    pub fn announce(&self) -> u64 {
        self.announced.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Has the commit of that number brought to disk.
    pub fn bring(&self, number: u64) {
        // A thread that is gone is noticed by whoever waits.
        let _ = self.made.send(number);
    }

    /// Every commit that may be seen by now.
    pub fn newest(&self) -> u64 {
        self.announced.load(Ordering::SeqCst)
    }

    pub async fn until_on_disk(&self, number: u64) -> sqlx::Result<()> {
        let mut on_disk = self.on_disk.clone();
        on_disk.wait_for(|reached| *reached >= number).await.map(drop).map_err(|_| sqlx::Error::WorkerCrashed)
    }
}

/// The newest commit that was made, once there is one.
fn newest(made: &Receiver<u64>) -> Option<u64> {
    let first = made.recv().ok()?;
    Some(made.try_iter().last().unwrap_or(first))
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
        _ => match File::open(path) {
            // A commit that failed before there was a log.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        },
    };
    file.insert(known).sync_data()
}
