// SPDX-License-Identifier: Apache-2.0

// Package tlsfiles reads the certificates and keys of connections.
package tlsfiles

import (
	"crypto/tls"
	"fmt"
	"os"

	"go.etcd.io/etcd/client/pkg/v3/transport"

	"github.com/segue-lb/segue/internal/desired"
)

// Client returns the settings of TLS for a client whose files are in a section of the configuration.
// The client's certificate and key are read for each connection, so they can be renewed without a
// restart. Client returns an error if a file cannot be used, or if everybody may read the key.
func Client(section string, files *desired.TLSFiles) (*tls.Config, error) {
	if files.KeyFile != "" {
		if err := CheckPrivate(files.KeyFile); err != nil {
			return nil, fmt.Errorf("%s.key-file: %w", section, err)
		}
	}
	info := transport.TLSInfo{TrustedCAFile: files.CAFile, CertFile: files.CertFile, KeyFile: files.KeyFile}
	settings, err := info.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", section, err)
	}
	return settings, nil
}

// CheckPrivate returns an error if users other than the owner and the group of a file have access
// to it.
func CheckPrivate(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if mode := info.Mode().Perm(); mode&0o007 != 0 {
		return fmt.Errorf("%s has mode %04o: everybody may use it; 0600 or 0640 is right", path, mode)
	}
	return nil
}
