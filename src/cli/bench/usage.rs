//! CPU and memory, read from /proc: this process, and a Postgres and a broker on the same machine with their children.

use std::collections::HashMap;
use std::fs;

use stockade_kernel::db::{Conn, Db};

/// What /proc counts CPU time in; fixed by the kernel's interface to user space.
const TICKS_PER_SECOND: f64 = 100.0;
/// A listening socket, as /proc/net/tcp says it.
const TCP_LISTEN: &str = "0A";

pub struct Usage {
    cpu_seconds: f64,
    /// Since the last [`Usage::begin`].
    pub peak_rss_bytes: u64,
}

impl Usage {
    /// As it is now, with the peak of memory forgotten: each round has its own.
    pub async fn begin(db: &Db, broker_url: &str) -> anyhow::Result<Self> {
        // Where that is not allowed, the peak is that of all rounds so far.
        let _ = fs::write("/proc/self/clear_refs", "5");
        Self::now(db, broker_url).await
    }

    pub async fn now(db: &Db, broker_url: &str) -> anyhow::Result<Self> {
        let mut ticks = ticks_of("self").map_or(0, |(_, ticks)| ticks);
        if let Some(broker) = broker(broker_url) {
            ticks += ticks_of_family(broker);
        }
        if let Some(postmaster) = postmaster(db).await? {
            ticks += ticks_of_family(postmaster);
        }
        Ok(Self { cpu_seconds: ticks as f64 / TICKS_PER_SECOND, peak_rss_bytes: peak_rss() })
    }

    pub fn cpu_per_1000(&self, before: &Self, orders: usize) -> f64 {
        let seconds = (self.cpu_seconds - before.cpu_seconds) / orders as f64 * 1000.0;
        (seconds * 1e4).round() / 1e4
    }
}

/// The process id of a Postgres whose data folder can be read here.
async fn postmaster(db: &Db) -> anyhow::Result<Option<u32>> {
    let mut tx = db.read().await?;
    let Conn::Postgres(c) = tx.conn() else { return Ok(None) };
    let folder: Result<String, _> =
        sqlx::query_scalar("SELECT setting FROM pg_settings WHERE name = 'data_directory'").fetch_one(&mut **c).await;
    let pid_file = folder.ok().and_then(|folder| fs::read_to_string(format!("{folder}/postmaster.pid")).ok());
    Ok(pid_file.and_then(|text| text.lines().next()?.trim().parse().ok()))
}

const AMQP_PORT: u16 = 5672;

/// The process id of a broker on this machine, by the port it listens on.
fn broker(url: &str) -> Option<u32> {
    let port = url::Url::parse(url).ok()?.port().unwrap_or(AMQP_PORT);
    let listens = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (address, state, inode) = (*fields.get(1)?, *fields.get(3)?, *fields.get(9)?);
        let port_here = u16::from_str_radix(address.rsplit_once(':')?.1, 16).ok()?;
        (port_here == port && state == TCP_LISTEN).then(|| format!("socket:[{inode}]"))
    };
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
    let sockets: Vec<String> = tables.iter().flat_map(|table| table.lines().filter_map(listens)).collect();
    let holds = |pid: u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let mut targets = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        targets.any(|target| sockets.iter().any(|socket| target.as_os_str() == socket.as_str())).then_some(pid)
    };
    let processes = fs::read_dir("/proc").ok()?;
    processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok()?.parse().ok()).find_map(holds)
}

/// (parent, CPU ticks of the process and of its children that have ended)
fn ticks_of(pid: &str) -> Option<(u32, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11..15)?.iter().filter_map(|field| field.parse::<u64>().ok()).sum();
    Some((fields.get(1)?.parse().ok()?, ticks))
}

fn ticks_of_family(root: u32) -> u64 {
    let Ok(entries) = fs::read_dir("/proc") else { return 0 };
    let processes: HashMap<u32, (u32, u64)> = entries
        .filter_map(|entry| {
            let pid = entry.ok()?.file_name().into_string().ok()?;
            Some((pid.parse().ok()?, ticks_of(&pid)?))
        })
        .collect();
    let belongs = |(pid, (parent, _)): &(&u32, &(u32, u64))| **pid == root || *parent == root;
    processes.iter().filter(belongs).map(|(_, (_, ticks))| ticks).sum()
}

fn peak_rss() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
}
