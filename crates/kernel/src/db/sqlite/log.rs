//! The log's way to the disk. A transaction is written into the log by whoever commits it, and the next one may begin at
//! once; one thread brings the log to disk for all who wait, as many commits at a time as there are by then.
//!
//! The log is kept from its beginning up to the first gap, so what was committed on top of a commit can be on disk only
//! together with it.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::{io, thread};

use tokio::sync::watch;

/// How much of a log is written anew at a time.
const PIECE: usize = 1 << 20;

pub struct Log {
    /// How many commits have been announced.
    announced: AtomicU64,
    on_disk: watch::Receiver<u64>,
    ended: mpsc::Sender<Ended>,
}

/// A commit that was announced: its number, and whether it was made.
type Ended = (u64, bool);

impl Log {
    /// Starts the thread, which ends with the log.
    pub fn start(mut bring_to_disk: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (ended, to_bring) = mpsc::channel();
        let (told, on_disk) = watch::channel(0);
        let work = move || {
            while let Some((number, made)) = newest(&to_bring) {
                if made {
                    bring_to_disk();
                }
                told.send_replace(number);
            }
        };
        thread::Builder::new().name("stockade-disk".to_owned()).spawn(work)?;
        Ok(Self { announced: AtomicU64::new(0), on_disk, ended })
    }

    /// Announces a commit that is just being made: from now on readers wait for it, who may see it before we know that
    /// it was made. Whether it was or not, [`Self::bring`] has to follow, before the next one is announced.
    pub fn announce(&self) -> u64 {
        self.announced.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Has the commit of that number brought to disk, if it was made.
    pub fn bring(&self, number: u64, made: bool) {
        // A thread that is gone is noticed by whoever waits.
        let _ = self.ended.send((number, made));
    }

    /// Every commit that may be seen by now.
    pub fn newest(&self) -> u64 {
        self.announced.load(Ordering::SeqCst)
    }

    /// The commit of that number, on its way to the disk; 0 is there.
    pub fn landing(&self, number: u64) -> Landing {
        Landing { number, on_disk: self.on_disk.clone() }
    }
}

/// A commit on its way to the disk.
#[derive(Clone)]
pub struct Landing {
    number: u64,
    on_disk: watch::Receiver<u64>,
}

impl Landing {
    /// Returns when it is there; cancelled, it can be asked again.
    pub async fn on_disk(&mut self) -> sqlx::Result<()> {
        let there = self.on_disk.wait_for(|reached| *reached >= self.number).await;
        there.map(drop).map_err(|_| sqlx::Error::WorkerCrashed)
    }

    /// Does what is to follow when it is there, also if whoever waits for that gives up.
    pub async fn then(mut self, follow: impl FnOnce() + Send + 'static) -> sqlx::Result<()> {
        let mut left = Left { landing: self.clone(), follow: Some(follow) };
        self.on_disk().await?;
        if let Some(follow) = left.follow.take() {
            follow();
        }
        Ok(())
    }
}

/// What is left to do if nobody waits for it any more.
struct Left<F: FnOnce() + Send + 'static> {
    landing: Landing,
    follow: Option<F>,
}

impl<F: FnOnce() + Send + 'static> Drop for Left<F> {
    fn drop(&mut self) {
        if let Some(follow) = self.follow.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let mut landing = self.landing.clone();
            runtime.spawn(async move {
                if landing.on_disk().await.is_ok() {
                    follow();
                }
            });
        }
    }
}

/// The newest commit that has ended, once there is one, and whether any since the last look was made.
fn newest(ended: &Receiver<Ended>) -> Option<Ended> {
    let first = ended.recv().ok()?;
    Some(ended.try_iter().fold(first, |(_, made), (number, also)| (number, made || also)))
}

/// What brings the log of a database to disk, which has the name that SQLite knows the file by. Should the disk fail, the process ends: what was written may be lost
/// though it looks kept, and only recovery from disk can tell.
pub fn of(database: &Path) -> impl FnMut() + Send + use<> {
    let path = log_of(database);
    let mut file = None;
    move || {
        if let Err(error) = bring_to_disk(&path, &mut file) {
            crate::db::abort_for_the_disk(&error);
        }
    }
}

/// Writes the bytes of a database's WAL over themselves and fsyncs it. Readers are not disturbed; the caller must hold the
/// write lock.
pub fn write_anew(database: &Path) -> io::Result<()> {
    let file = match File::options().read(true).write(true).open(log_of(database)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    loop {
        let length = file.read_at(&mut piece, at)?;
        if length == 0 {
            return file.sync_data();
        }
        file.write_all_at(&piece[..length], at)?;
        at += length as u64;
    }
}

fn log_of(database: &Path) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push("-wal");
    PathBuf::from(path)
}

fn bring_to_disk(path: &Path, file: &mut Option<File>) -> io::Result<()> {
    let known = match file.take() {
        // SQLite removes the log when its last connection closes, and begins another.
        Some(file) if file.metadata()?.nlink() > 0 => file,
        _ => File::open(path)?,
    };
    file.insert(known).sync_data()
}
