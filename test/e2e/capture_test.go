// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/segue-lb/segue/lab"
)

// capture records the packets of a node at its port of the fabric.
type capture struct {
	node *lab.Node
	mac  net.HardwareAddr
	file sharedFile
	tap  *lab.Capture
}

// sharedFile can be read while it is written.
type sharedFile struct {
	mu   sync.Mutex
	data bytes.Buffer
}

func (f *sharedFile) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.data.Write(p)
}

// String returns what is written so far.
func (f *sharedFile) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.data.String()
}

// reader returns a reader of the bytes that are written so far.
func (f *sharedFile) reader() io.Reader {
	f.mu.Lock()
	defer f.mu.Unlock()
	return bytes.NewReader(bytes.Clone(f.data.Bytes()))
}

// startCapture records the packets that a balancer receives for services and sends to servers.
func startCapture(t *testing.T, l *lab.Lab, node string) *capture {
	t.Helper()
	c := &capture{node: l.Node(node)}
	must(t, c.node.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err == nil {
			c.mac = eth0.HardwareAddr
		}
		return err
	}))
	var err error
	c.tap, err = l.Node("fabric").Capture(node, &c.file)
	must(t, err)
	return c
}

// awaitBalance waits until the node has sent on all recorded packets, and at least the given
// number. Then it ends the capture. A client's last packets may still be on the path when the
// client has its answer.
func (c *capture) awaitBalance(t *testing.T, least int) (received, sent [][]byte) {
	t.Helper()
	eventually(t, func() error {
		received, sent = c.frames(t)
		if len(received) != len(sent) || len(received) < least {
			return fmt.Errorf("%s received %d packets for VIPs and sent %d", c.node.Name, len(received), len(sent))
		}
		return nil
	})
	must(t, c.tap.Stop())
	return received, sent
}

// stop ends the capture at once.
func (c *capture) stop(t *testing.T) (received, sent [][]byte) {
	t.Helper()
	must(t, c.tap.Stop())
	return c.frames(t)
}

// frames returns the recorded frames with TCP or UDP, separated by direction. It leaves out
// neighbour discovery and the host's other traffic.
func (c *capture) frames(t *testing.T) (received, sent [][]byte) {
	t.Helper()
	for _, frame := range frames(t, c.file.reader()) {
		_, isTCP := layer[*layers.TCP](frame)
		_, isUDP := layer[*layers.UDP](frame)
		switch {
		case !isTCP && !isUDP:
		case bytes.Equal(frame[:6], c.mac):
			received = append(received, frame)
		case bytes.Equal(frame[6:12], c.mac):
			sent = append(sent, frame)
		}
	}
	return received, sent
}

// frames reads a pcap file.
func frames(t *testing.T, file io.Reader) (all [][]byte) {
	t.Helper()
	reader, err := pcapgo.NewReader(file)
	must(t, err)
	for {
		frame, _, err := reader.ReadPacketData()
		if errors.Is(err, io.EOF) {
			return all
		}
		must(t, err)
		all = append(all, frame)
	}
}

// layer returns the innermost layer of a type in a frame.
func layer[T gopacket.Layer](frame []byte) (found T, ok bool) {
	for _, l := range gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.NoCopy).Layers() {
		if l, is := l.(T); is {
			found, ok = l, true
		}
	}
	return found, ok
}
