// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// longestPassword, in bytes, is TCP_MD5SIG_MAXKEYLEN of the kernel.
const longestPassword = 80

// ReadPasswords reads the password files of all peers. A file must be a regular file to which only
// its owner has access. The error is of type fieldpath.Errors. It names fields and files, and never
// quotes the content of a file.
func ReadPasswords(b *desired.BGP) (desired.Passwords, error) {
	if b == nil {
		return nil, nil
	}
	passwords := desired.Passwords{}
	var problems fieldpath.Errors
	for i, peer := range b.Peers {
		if peer.PasswordFile == "" {
			continue
		}
		password, err := readPassword(peer.PasswordFile)
		if err != nil {
			problems = append(problems, &fieldpath.Error{
				Path:  fieldpath.Child(fieldpath.Item("bgp.peers", i), "password-file"),
				Value: peer.PasswordFile, Problem: err.Error(),
			})
		}
		passwords[peer.Name()] = password
	}
	return passwords, problems.OrNil()
}

// readPassword reads a file with one line.
func readPassword(file string) (string, error) {
	const lineBreak = "\r\n"
	content, err := readSecret(file, longestPassword+len(lineBreak))
	if err != nil {
		return "", err
	}
	password := strings.TrimSuffix(strings.TrimSuffix(content, "\n"), "\r")
	switch {
	case password == "":
		return "", fmt.Errorf("must hold a password of 1 to %d bytes", longestPassword)
	case len(password) > longestPassword:
		return "", fmt.Errorf("must hold a password of 1 to %d bytes, has more", longestPassword)
	case strings.ContainsFunc(password, unicode.IsControl):
		return "", fmt.Errorf("must hold one line of printable characters")
	}
	return password, nil
}
