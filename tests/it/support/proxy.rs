//! A TCP proxy between a server and its broker or database, to break the link between them: by a reset, or half-open,
//! when both ends believe in a connection that no longer carries anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

#[derive(Clone, Copy)]
enum Link {
    /// Forwards. Connections of an earlier generation are reset.
    Open { generation: u32 },
    /// Discards every byte of every connection, including new ones.
    HalfOpen,
}

/// Forwards connections to a port on this machine until it is dropped.
pub struct Proxy {
    target: u16,
    port: u16,
    link: watch::Sender<Link>,
    accepted: Arc<AtomicUsize>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    pub async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let link = watch::Sender::new(Link::Open { generation: 0 });
        let links = link.clone();
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = accepted.clone();
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                count.fetch_add(1, Ordering::Relaxed);
                connections.spawn(carry(client, target, links.subscribe()));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { target, port, link, accepted, _accepting: accepting }
    }

    /// A URL of the target, changed to lead through the proxy.
    pub fn url(&self, of_target: &str) -> String {
        of_target.replace(&format!(":{}", self.target), &format!(":{}", self.port))
    }

    /// How many connections were made so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Resets every connection (RST to both ends). New ones are forwarded.
    pub fn reset(&self) {
        self.link.send_modify(|link| {
            if let Link::Open { generation } = link {
                *generation += 1;
            }
        });
    }

    /// Discards all bytes from now on. Connections stay open, and new ones are accepted.
    pub fn go_half_open(&self) {
        self.link.send_replace(Link::HalfOpen);
    }

    /// Forwards new connections again. Those from before carry nothing any more.
    pub fn restore(&self) {
        self.link.send_replace(Link::Open { generation: 0 });
    }
}

async fn carry(mut client: TcpStream, target: u16, mut link: watch::Receiver<Link>) {
    // A target that is down refuses: so does its proxy.
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    let found = *link.borrow_and_update();
    let fault = match found {
        Link::HalfOpen => Link::HalfOpen,
        Link::Open { generation: mine } => tokio::select! {
            biased;
            changed = link.wait_for(|now| !matches!(now, Link::Open { generation } if *generation == mine)) => {
                let Ok(fault) = changed else { return };
                *fault
            }
            _ = copy_bidirectional(&mut client, &mut server) => return,
        },
    };
    match fault {
        Link::Open { .. } => {
            // Without lingering, closing sends RST instead of FIN.
            client.set_zero_linger().unwrap();
            server.set_zero_linger().unwrap();
        }
        // Each end is closed by the other's silence alone: not even a FIN passes.
        Link::HalfOpen => drop(tokio::join!(discard(&mut client), discard(&mut server))),
    }
}

async fn discard(stream: &mut TcpStream) {
    let mut bytes = [0; 4096];
    while let Ok(1..) = stream.read(&mut bytes).await {}
}
