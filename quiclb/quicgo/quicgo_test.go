// SPDX-License-Identifier: Apache-2.0

package quicgo

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/quiclb"
)

// limit is the time to wait for operations that take next to no time, unless the machine stands
// still.
const limit = time.Minute

var (
	config   = quiclb.Config{Rotation: 2, ServerIDLength: 3, NonceLength: 8, EncodeLength: true}
	serverID = []byte{0xc4, 0x60, 0x5e}
)

func TestNewErrors(t *testing.T) {
	bad := config
	bad.Rotation = 7
	if _, err := New(bad, serverID); err == nil || err.Error() != "rotation 7: must be 0 to 6" {
		t.Errorf("error %v", err)
	}
	_, err := New(config, serverID[:2])
	if err == nil || err.Error() != "server ID c460: is 2 octets, must be 3" {
		t.Errorf("error %v", err)
	}
}

// TestHandshakes checks the IDs of both sides. All packets of the server name it, except Version
// Negotiation, which repeats the client's ID (RFC 8999 section 6). All packets of the client name
// the server, except those with the ID that the client chose. The client chooses another one if the
// server does not have the client's version.
func TestHandshakes(t *testing.T) {
	unknownFirst := []quic.Version{quic.Version2, quic.Version1}
	for name, test := range map[string]struct {
		retry    bool
		versions []quic.Version // of the client
		chosen   int            // how many IDs the client chooses
	}{
		"plain":                         {false, nil, 1},
		"Retry":                         {true, nil, 1},
		"version negotiation":           {false, unknownFirst, 2},
		"version negotiation and Retry": {true, unknownFirst, 2},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRecorder(t)
			c := dial(t, r, serve(t, test.retry), &quic.Config{Versions: test.versions})
			c.echo(t)
			sent, received := r.packets()

			chosen := map[string]bool{}
			for _, packet := range sent {
				switch id := destination(packet); {
				case namesServer(id):
				case isLong(packet):
					chosen[string(id)] = true
				default:
					t.Errorf("a packet after the handshake has the ID %x", id)
				}
			}
			if len(chosen) != test.chosen {
				t.Errorf("the client chose %d IDs, want %d", len(chosen), test.chosen)
			}

			sawRetry, sawNegotiation := false, false
			for _, packet := range received {
				switch {
				case !isLong(packet):
				case isNegotiation(packet):
					sawNegotiation = true
				case !namesServer(source(packet)):
					t.Errorf("a packet of the server has the source ID %x", source(packet))
				default:
					sawRetry = sawRetry || isRetry(packet)
				}
			}
			if sawRetry != test.retry || sawNegotiation != (test.versions != nil) {
				t.Errorf("Retry %t, Version Negotiation %t", sawRetry, sawNegotiation)
			}
		})
	}
}

// TestMigration changes the client's address more often than the server issues IDs in the
// beginning. All packets after the handshake name the server, and no ID is used from two addresses.
func TestMigration(t *testing.T) {
	client := newRecorder(t)
	c := dial(t, client, serve(t, false), nil)
	c.echo(t)
	recorders := []*recorder{client}
	for range 8 {
		next := newRecorder(t)
		recorders = append(recorders, next)
		c.migrate(t, next)
		c.echo(t)
	}
	usedBy := map[string]int{}
	for i, r := range recorders {
		sent, _ := r.packets()
		for _, packet := range sent {
			id := destination(packet)
			if !namesServer(id) {
				if !isLong(packet) {
					t.Errorf("address %d: a packet after the handshake has the ID %x", i, id)
				}
				continue
			}
			if by, used := usedBy[string(id)]; used && by != i {
				t.Errorf("the ID %x is used from the addresses %d and %d", id, by, i)
			}
			usedBy[string(id)] = i
		}
	}
	if len(usedBy) < len(recorders) {
		t.Errorf("%d connection IDs for %d addresses", len(usedBy), len(recorders))
	}
}

// isLong tells whether a packet has a long header (RFC 8999 section 5.1).
func isLong(packet []byte) bool { return packet[0]&0x80 != 0 }

// isNegotiation tells whether a packet with a long header is Version Negotiation, which has version
// 0 (RFC 8999 section 6).
func isNegotiation(packet []byte) bool { return bytes.Equal(packet[1:5], make([]byte, 4)) }

// isRetry tells whether a packet of QUIC version 1 is a Retry packet (RFC 9000 section 17.2.5).
func isRetry(packet []byte) bool { return packet[0]&0xb0 == 0xb0 }

// destination returns the destination connection ID of a packet (RFC 8999 section 5).
func destination(packet []byte) []byte {
	if isLong(packet) {
		return packet[6 : 6+int(packet[5])]
	}
	return packet[1 : 1+config.Length()]
}

// source returns the source connection ID of a packet with a long header (RFC 8999 section 5.1).
func source(packet []byte) []byte {
	rest := packet[6+int(packet[5]):]
	return rest[1 : 1+int(rest[0])]
}

func namesServer(id []byte) bool {
	got, ok := config.ServerID(id)
	return ok && bytes.Equal(got, serverID)
}

// recorder is a socket of a client, and keeps the datagrams that it sends and receives.
type recorder struct {
	net.PacketConn
	transport      *quic.Transport
	mu             sync.Mutex
	sent, received [][]byte
}

func newRecorder(t *testing.T) *recorder {
	t.Helper()
	r := &recorder{PacketConn: listen(t)}
	r.transport = &quic.Transport{Conn: r}
	t.Cleanup(func() { _ = r.transport.Close() })
	return r
}

// WriteTo implements net.PacketConn.
func (r *recorder) WriteTo(datagram []byte, to net.Addr) (int, error) {
	r.mu.Lock()
	r.sent = append(r.sent, slices.Clone(datagram))
	r.mu.Unlock()
	return r.PacketConn.WriteTo(datagram, to)
}

// ReadFrom implements net.PacketConn.
func (r *recorder) ReadFrom(buffer []byte) (int, net.Addr, error) {
	n, from, err := r.PacketConn.ReadFrom(buffer)
	if n > 0 {
		r.mu.Lock()
		r.received = append(r.received, slices.Clone(buffer[:n]))
		r.mu.Unlock()
	}
	return n, from, err
}

// packets returns the first packet of each datagram. All packets of a datagram have the same
// connection IDs (RFC 9000 section 12.2).
func (r *recorder) packets() (sent, received [][]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.sent), slices.Clone(r.received)
}

func listen(t *testing.T) net.PacketConn {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	testhost.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// serve starts a server of QUIC version 1, which sends back what it receives on a stream.
func serve(t *testing.T, retry bool) net.Addr {
	t.Helper()
	generator, err := New(config, serverID)
	testhost.Must(t, err)
	conn := listen(t)
	transport := &quic.Transport{
		Conn: conn, ConnectionIDGenerator: generator,
		VerifySourceAddress: func(net.Addr) bool { return retry },
	}
	listener, err := transport.Listen(
		&tls.Config{Certificates: []tls.Certificate{certificate(t)}, NextProtos: []string{"echo"}},
		&quic.Config{Versions: []quic.Version{quic.Version1}})
	testhost.Must(t, err)
	var done sync.WaitGroup
	done.Go(func() { acceptAndEcho(listener) })
	t.Cleanup(func() {
		_ = transport.Close()
		done.Wait()
	})
	return conn.LocalAddr()
}

// acceptAndEcho accepts one connection and its first stream, and sends back what it receives there.
func acceptAndEcho(listener *quic.Listener) {
	conn, err := listener.Accept(context.Background())
	if err != nil {
		return
	}
	stream, err := conn.AcceptStream(context.Background())
	if err != nil {
		return
	}
	_, _ = io.Copy(stream, stream)
}

func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	testhost.Must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	testhost.Must(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}
}

// client is a connection with one stream.
type client struct {
	*quic.Conn
	stream *quic.Stream
}

// dial connects to a server and opens a stream. The client does not check the certificate.
func dial(t *testing.T, from *recorder, to net.Addr, quicConfig *quic.Config) *client {
	t.Helper()
	tlsConfig := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"echo"}}
	conn, err := from.transport.Dial(deadline(t), to, tlsConfig, quicConfig)
	testhost.Must(t, err)
	stream, err := conn.OpenStream()
	testhost.Must(t, err)
	return &client{conn, stream}
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// echo sends a message and waits until it comes back.
func (c *client) echo(t *testing.T) {
	t.Helper()
	message := []byte("which server is this?")
	testhost.Must(t, c.stream.SetDeadline(time.Now().Add(limit)))
	if _, err := c.stream.Write(message); err != nil {
		t.Fatal(err)
	}
	reply := make([]byte, len(message))
	if _, err := io.ReadFull(c.stream, reply); err != nil || !bytes.Equal(reply, message) {
		t.Fatalf("sent %q, received %q: %v", message, reply, err)
	}
}

// migrate continues the connection from another address.
func (c *client) migrate(t *testing.T, to *recorder) {
	t.Helper()
	path, err := c.AddPath(to.transport)
	testhost.Must(t, err)
	testhost.Must(t, path.Probe(deadline(t)))
	testhost.Must(t, path.Switch())
}
