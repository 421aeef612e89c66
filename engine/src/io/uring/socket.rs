//! The socket calls that are not worth a ring operation: set-up, options, addresses.

use std::io;
use std::mem::size_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Connections the kernel completes ahead of us.
const BACKLOG: i32 = 1024;

fn check(result: i32) -> io::Result<i32> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// A listening TCP socket on `addr` that shares its port with those of the other shards.
pub(super) fn listen(addr: SocketAddr) -> io::Result<OwnedFd> {
    let family = if addr.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // SAFETY: the call touches no memory, and its result is a descriptor of our own.
    let fd = unsafe {
        let fd = check(libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0))?;
        OwnedFd::from_raw_fd(fd)
    };
    set(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
    set(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT)?;
    bind(&fd, addr)?;
    // SAFETY: a call on our own descriptor; it touches no memory.
    check(unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) })?;
    Ok(fd)
}

/// Sends small writes at once.
pub(super) fn set_no_delay(fd: &OwnedFd) -> io::Result<()> {
    set(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY)
}

fn set(fd: &OwnedFd, level: i32, option: i32) -> io::Result<()> {
    let on: i32 = 1;
    // SAFETY: the option value is one int that lives across the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(&on).cast(),
            size_of::<i32>() as u32,
        )
    };
    check(result).map(drop)
}

/// Ends both directions: receives and sends in flight complete.
pub(super) fn shut_down(fd: &OwnedFd) {
    // SAFETY: a call on our own descriptor; it touches no memory. Its only failure is a peer that is gone already.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RDWR) };
}

fn bind(fd: &OwnedFd, addr: SocketAddr) -> io::Result<()> {
    let fd = fd.as_raw_fd();
    let result = match addr {
        SocketAddr::V4(addr) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: addr.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(addr.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            let len = size_of::<libc::sockaddr_in>() as u32;
            // SAFETY: the address lives across the call and has this length.
            unsafe { libc::bind(fd, std::ptr::from_ref(&raw).cast(), len) }
        }
        SocketAddr::V6(addr) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: addr.port().to_be(),
                sin6_flowinfo: addr.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: addr.ip().octets(),
                },
                sin6_scope_id: addr.scope_id(),
            };
            let len = size_of::<libc::sockaddr_in6>() as u32;
            // SAFETY: the address lives across the call and has this length.
            unsafe { libc::bind(fd, std::ptr::from_ref(&raw).cast(), len) }
        }
    };
    check(result).map(drop)
}

/// The address a socket is bound to.
pub(super) fn local_addr(fd: &OwnedFd) -> io::Result<SocketAddr> {
    address(fd, libc::getsockname)
}

/// The address of the other end.
pub(super) fn peer_addr(fd: &OwnedFd) -> io::Result<SocketAddr> {
    address(fd, libc::getpeername)
}

type AddressCall = unsafe extern "C" fn(RawFd, *mut libc::sockaddr, *mut libc::socklen_t) -> i32;

fn address(fd: &OwnedFd, call: AddressCall) -> io::Result<SocketAddr> {
    // SAFETY: all-zero is a valid address storage; it and its length live across the call.
    let storage = unsafe {
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        let mut len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        check(call(fd.as_raw_fd(), (&raw mut storage).cast(), &raw mut len))?;
        storage
    };
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that the storage, large enough and aligned for any address, holds this one.
            let raw = unsafe { *(&raw const storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { *(&raw const storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            let port = u16::from_be(raw.sin6_port);
            Ok(SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into())
        }
        _ => Err(io::Error::from(io::ErrorKind::Unsupported)),
    }
}
