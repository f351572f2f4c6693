// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// responder answers questions for some VIPs on a link. A goroutine reads the frames.
type responder struct {
	*socket
	mac      net.HardwareAddr
	led      atomic.Pointer[map[netip.Addr]bool] // the VIPs for which it answers
	answers  atomic.Uint64
	claims   chan<- message
	failures chan<- error
	group    sync.WaitGroup
}

// startResponder opens a link, and begins to answer there: for no VIP at first. It sends claims of
// other hosts to a VIP for which it answers to a channel, except for those that come faster than
// the reader takes them. It sends an error to another channel if the link fails.
func startResponder(l link, claims chan<- message, failures chan<- error) (*responder, error) {
	s, err := openSocket(l.ifindex)
	if err != nil {
		return nil, err
	}
	r := &responder{socket: s, mac: l.mac, claims: claims, failures: failures}
	r.led.Store(&map[netip.Addr]bool{})
	r.group.Go(r.read)
	return r, nil
}

// answerFor makes the responder answer for these VIPs, and for no others.
func (r *responder) answerFor(vips []netip.Addr) error {
	led := make(map[netip.Addr]bool, len(vips))
	for _, vip := range vips {
		led[vip] = true
	}
	r.led.Store(&led)
	return r.join(vips)
}

// close ends the answers.
func (r *responder) close() error {
	err := r.socket.Close()
	r.group.Wait()
	return err
}

// read reads and handles frames until the socket is closed, or the link fails.
func (r *responder) read() {
	buffer := make([]byte, longestMessage)
	for {
		n, err := r.Read(buffer)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err == nil {
			err = r.handle(buffer[:n])
		}
		if err != nil {
			select {
			case r.failures <- err:
			default: // one suffices to open the link again
			}
			return
		}
	}
}

// handle answers a frame, if it asks for a VIP of this balancer. It returns an error if the link
// fails.
func (r *responder) handle(frame []byte) error {
	m, ok := read(frame)
	if !ok || bytes.Equal(m.mac, r.mac) {
		return nil
	}
	led := *r.led.Load()
	if led[m.claims] {
		m.mac = bytes.Clone(m.mac) // the buffer is used again
		select {
		case r.claims <- m:
		default:
		}
	}
	if !led[m.asks] {
		return nil
	}
	r.answers.Add(1)
	if err := r.sendAll(m.answer(r.mac)); !errors.Is(err, unix.ENOBUFS) {
		return err
	}
	return nil // the link's queue is full, and the host asks again
}
