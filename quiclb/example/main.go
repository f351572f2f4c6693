// SPDX-License-Identifier: Apache-2.0

// Command example is an HTTP/3 server whose connection IDs name it. It answers each request with
// its server ID, the protocol and the client's address. A request for /?octets=N gets N octets
// more, for tests of downloads.
//
//	go run ./quiclb/example -server-id c4605e -listen :4433
//
// The certificate is new in each run. When the server listens, it prints its address and the
// SHA-256 of the certificate's public key in base64, by which Chromium can be told to trust it.
// Requests go to the log.
package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"flag"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/segue-lb/segue/quiclb"
	"github.com/segue-lb/segue/quiclb/quicgo"
)

func main() {
	listen := flag.String("listen", ":0", "UDP address and port; without an address, all of the host")
	id := flag.String("server-id", "", "server ID, 1 to 15 octets in hexadecimal; required")
	rotation := flag.Uint("rotation", 0, "config rotation codepoint, 0 to 6")
	nonce := flag.Int("nonce-length", 8, "length of the nonce, 4 to 18 octets")
	encodeLength := flag.Bool("encode-length", false, "put the length of the connection ID into it")
	retry := flag.Bool("retry", false, "let each client prove its address by a Retry packet")
	flag.Parse()

	generator, err := newGenerator(*id, *rotation, *nonce, *encodeLength)
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(serve(*listen, generator, *retry, answer(*id)))
}

// newGenerator returns the generator that the flags describe.
func newGenerator(
	id string, rotation uint, nonce int, encodeLength bool,
) (*quicgo.Generator, error) {
	serverID, err := quiclb.ParseServerID(id)
	if err != nil {
		return nil, err
	}
	if rotation > quiclb.MaxRotation {
		return nil, fmt.Errorf("rotation %d: must be 0 to %d", rotation, quiclb.MaxRotation)
	}
	return quicgo.New(quiclb.Config{
		Rotation: uint8(rotation), ServerIDLength: len(serverID), NonceLength: nonce,
		EncodeLength: encodeLength,
	}, serverID)
}

// serve serves requests at a UDP address. It returns only when it fails.
func serve(address string, generator *quicgo.Generator, retry bool, handler http.Handler) error {
	certificate, err := newCertificate()
	if err != nil {
		return err
	}
	conn, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	transport := &quic.Transport{
		Conn:                  conn,
		ConnectionIDGenerator: generator,
		VerifySourceAddress:   func(net.Addr) bool { return retry },
	}
	tlsConfig := &tls.Config{Certificates: []tls.Certificate{certificate}}
	listener, err := transport.ListenEarly(http3.ConfigureTLSConfig(tlsConfig), &quic.Config{Allow0RTT: true})
	if err != nil {
		return err
	}
	fmt.Println(conn.LocalAddr(), keyHash(certificate))
	return (&http3.Server{Handler: handler}).ServeListener(listener)
}

// answer returns the handler that logs each request, and answers with the server ID.
func answer(id string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		log.Printf("%s %s %s from %s", r.Proto, r.Method, r.URL, r.RemoteAddr)
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("X-Segue-Server", id)
		fmt.Fprintf(w, "server %s, %s, client %s\n", id, r.Proto, r.RemoteAddr)
		pad(w, r.URL.Query().Get("octets"))
	})
}

// pad writes as many full stops as the number in the text says, or none if it is no number.
func pad(w io.Writer, octets string) {
	left, _ := strconv.Atoi(octets)
	block := bytes.Repeat([]byte("."), 16384)
	for left > 0 {
		n, err := w.Write(block[:min(left, len(block))])
		if err != nil {
			return // the client is gone
		}
		left -= n
	}
}

// newCertificate returns a certificate that is signed by its own key.
func newCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		DNSNames:     []string{"localhost"},
		NotBefore:    time.Now().Add(-time.Hour), // for clocks that are slow
		NotAfter:     time.Now().Add(7 * 24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
}

// keyHash returns the SHA-256 of the certificate's public key, in base64.
func keyHash(certificate tls.Certificate) string {
	sum := sha256.Sum256(certificate.Leaf.RawSubjectPublicKeyInfo)
	return base64.StdEncoding.EncodeToString(sum[:])
}
