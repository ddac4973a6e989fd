//! The accept loop: so many connections and no more, none of which may take its time to say what it wants.
//!
//! A connection that has not sent a request's headers within the time for it is closed, be it new or kept alive: whoever
//! trickles headers or holds connections open takes a place for so long and does nothing else to anybody. So is one that
//! takes nothing of an answer for as long. Beyond the limit, connections wait with the system until a place is free.
//!
//! What a client sends before its last request was answered waits with the client: the system keeps a few kilobytes of it for
//! us and has the sender hold the rest. Whoever floods us would otherwise have us woken for every packet of what we
//! cannot look at yet, which can cost half of what we can do.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::limits::Advice;

/// Larger heads are answered with a 431: those that are still coming by hyper, those that came at once by `finish`.
pub(super) const HEAD_BYTES_MAX: usize = 32 * 1024;
/// What the system may keep of a connection's bytes that we have not read; it takes twice as much for its own books. More than
/// an order has.
const UNREAD_BYTES_MAX: u32 = 4 * 1024;
/// Connections that may wait with the system to be accepted. Of a crowd that comes with a connection for each request, more would
/// only be accepted to be refused.
const WAITING_MAX: u32 = 128;
/// When the process is out of file handles, closing connections is all that helps; until then there is no hurry.
const OUT_OF_HANDLES_PAUSE: Duration = Duration::from_millis(100);

/// The limits of the accept loop; each has its setting in `config.rs`.
#[derive(Debug, Clone, Copy)]
pub struct Doorway {
    pub connections_max: usize,
    /// How long headers may take to come, and how long an answer may wait to be read on.
    pub header_timeout: Duration,
}

/// Where a request came from.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub IpAddr);

/// Takes the address.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A server that is started again must not wait until the system has forgotten the connections of the one before.
    socket.set_reuseaddr(true)?;
    // Before it listens: the connections inherit it.
    socket.set_recv_buffer_size(UNREAD_BYTES_MAX)?;
    socket.bind(address)?;
    socket.listen(WAITING_MAX)
}

/// Serves until `stop`, then lets the requests in hand finish.
pub async fn serve(listener: TcpListener, router: Router, doorway: Doorway, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(doorway.connections_max));
    let (graceful, connections) = (GracefulShutdown::new(), TaskTracker::new());
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(doorway.header_timeout).max_buf_size(HEAD_BYTES_MAX);
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            accepted = accepted => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(OUT_OF_HANDLES_PAUSE).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY cannot be set");
        }
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(doorway.header_timeout));
        let (router, peer, advice) = (router.clone(), Peer(address.ip().to_canonical()), Advice::default());
        let answer = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(advice.clone());
            let router = router.clone();
            async move {
                Ok::<_, Infallible>(router.oneshot(request.map(Body::new)).await.unwrap_or_else(|never| match never {}))
            }
        });
        let connection = graceful.watch(http.serve_connection(TokioIo::new(Box::pin(stream)), answer));
        connections.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection broke off");
            }
            drop(place);
        });
    }
    drop(listener);
    connections.close();
    graceful.shutdown().await;
    connections.wait().await;
}
